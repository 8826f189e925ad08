"""The live page of a run, and the charts that it shares with the report.

```
 driver.pulse ──look()──► Now ──┐
                                ├─► Feed, the one producer ──► a bounded queue a client ──► server-sent events
 StepRecords ──charts──► SVG ───┘                         └──► /api/snapshot
```

Nothing is built and nothing comes from another host: `static/` is served as it is.
"""

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
"""What browsers get."""
