"""The live page of a run, and the charts that it shares with the report.

```
 driver.pulse ──look()──► Now ──┐
                                ├─► Feed, the one producer ──► a bounded queue a client ──► server-sent events
 StepRecords ──charts──► data ──┘                         └──► /api/snapshot
```

Nothing is built and nothing comes from another host: `static/` is served as it is. `static/charts.js`
draws the charts with uPlot, which lies beside it with its licence.
"""

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
"""What browsers get."""

CHART_SCRIPTS: Final = ("uPlot.iife.min.js", "charts.js")
"""What draws the charts, in the order in which it is loaded."""

STYLES: Final = ("uPlot.min.css", "page.css")
"""Of the live page and the report, in their order."""
