"""Programs that tests start as processes of their own, and their clients."""

from pathlib import Path

FOLDER = Path(__file__).parent
