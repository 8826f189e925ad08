"""The live page of a run, and the charts that it shares with the report.

```
 live status ──────────► Now ──┐
                                ├─► Feed (one per run) ──► one bounded queue per client ──► server-sent events
 StepRecords ──charts──► data ──┘                         └──► /api/snapshot
```

There is no build step and nothing is loaded from another host: `static/` is served as it is.
`static/charts.js` draws the charts with uPlot, which is in the same folder with its licence.
"""

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
"""The folder of files that browsers load."""

CHART_SCRIPTS: Final = ("uPlot.iife.min.js", "charts.js")
"""The scripts that draw the charts, in loading order."""

STYLES: Final = ("uPlot.min.css", "page.css")
"""The style sheets of the live page and the report, in loading order."""
