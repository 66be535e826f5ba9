"""Python in a process of its own, as tests start it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(
    *words: object, folder: Path = ROOT, seconds: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, and fail with what it says where it fails."""
    command, how = [sys.executable, *map(str, words)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=how, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done
