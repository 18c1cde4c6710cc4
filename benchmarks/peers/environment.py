"""Environments of the peers: their own packages by pinned versions, and this environment's torch.

A peer's environment sees this one's packages through a .pth file behind its own, so torch is there once, and
both sides of a comparison run on the same one. pip is told not to replace it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent


def requirements(*peers: str) -> list[Path]:
    found = [HERE / f"requirements-{peer}.txt" for peer in peers]
    for path in found:
        if not path.is_file():
            known = sorted(one.stem.partition("-")[2] for one in HERE.glob("requirements-*.txt"))
            raise ValueError(f"no peer {path.stem.partition('-')[2]!r}; there are {', '.join(known)}")
    return found


def environment(cache: Path, *peers: str) -> Path:
    """The Python of an environment with these peers, made where it isn't there yet. Ends the program where
    they can't be installed."""
    files = requirements(*peers)
    ours = sysconfig.get_paths()["purelib"]
    torch = version("torch").partition("+")[0]
    key = hashlib.sha256("\n".join([ours, torch, *(file.read_text() for file in files)]).encode())
    folder = cache.resolve() / f"{'-'.join(peers)}-{key.hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    print(f"installing {', '.join(peers)} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    place = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    )
    (Path(place.stdout.strip()) / "shared.pth").write_text(ours + "\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch}\n")
    words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words += ["-c", str(constraints)]
    for file in files:
        words += ["-r", str(file)]
    if subprocess.run(words).returncode:
        raise SystemExit(f"{', '.join(peers)} could not be installed: {' '.join(words)}")
    (folder / "ready").touch()
    return python
