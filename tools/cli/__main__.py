"""`python -m actorium.tools.cli`."""

from __future__ import annotations

import sys

from actorium.tools.cli import main

sys.exit(main())
