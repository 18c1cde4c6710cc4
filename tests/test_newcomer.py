"""A newcomer's path, as one: clone, `make demo`, its report, a script changed by README's diff, run really
and virtually, and planned."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def patched(script: str, difference: str) -> str:
    """The script with a difference of changed lines alone: old lines give way to new ones, place by place."""
    lines = script.split("\n")
    at = 0
    for place in re.split(r"\n\n", difference):
        old = [line[1:] for line in place.split("\n") if line.startswith("-")]
        new = [line[1:] for line in place.split("\n") if line.startswith("+")]
        assert old, f"nothing tells where this belongs: {place}"
        while lines[at : at + len(old)] != old:
            at += 1
            assert at < len(lines), f"the script has no such lines: {old}"
        lines[at : at + len(old)] = new
        at += len(new)
    return "\n".join(lines)


def difference() -> str:
    return (ROOT / "README.md").read_text().split("```diff\n")[1].split("\n```")[0]


def test_the_difference_makes_one_script_of_the_other() -> None:
    plain = (ROOT / "examples" / "plain_ddp.py").read_text()
    assert patched(plain, difference()) == (ROOT / "examples" / "offbeat_version.py").read_text()


class Person:
    """Who types commands, and reads what they say."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "venv" / "bin"
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.env["PATH"] = f"{self.bin}{os.pathsep}{self.env['PATH']}"
        self.env.pop("PYTHONPATH", None)

    def types(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-6000:]}"
        return done.stdout


@pytest.mark.slow
def test_a_newcomer_s_path(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone, so it cannot be cloned")
    person = Person(tmp_path)
    person.types(sys.executable, "-m", "venv", "venv")
    # What is installed here is there already, so torch isn't fetched again; Offbeat itself is installed.
    (home,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (home / "here.pth").write_text("\n".join(site.getsitepackages()))

    person.types("git", "clone", "--quiet", str(ROOT), "offbeat")
    person.folder = tmp_path / "offbeat"
    said = person.types("make", "demo", f"VENV={tmp_path / 'venv'}")
    found = re.search(r"offbeat: (\S+report\.html) shows it in a browser: (.+)", said)
    assert found, said
    page = (person.folder / found[1]).read_text()
    assert "accuracy" in found[2]
    assert len(re.findall(r"reached|faster|no faster|beyond chance", page)) > 0
    assert all(plan in page for plan in ("local", "dasgd", "asp"))

    script = person.folder / "own.py"
    plain = (person.folder / "examples" / "plain_ddp.py").read_text()
    script.write_text(plain)
    before = person.types(
        "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "own.py"
    )
    script.write_text(patched(plain, difference()))
    alone = person.types("python", "own.py")
    really = person.types("offbeat", "run", "-n", "2", "own.py")
    virtually = person.types("offbeat", "run", "--virtual", "8", "--cluster", "ethernet-256", "own.py")
    for text in (before, alone, really, virtually):
        accuracy = re.search(r"accuracy (0\.\d+)", text)
        assert accuracy, text
        assert float(accuracy[1]) > 0.85, text
    person.types("offbeat", "profile", "-n", "2", "own.py")
    planned = person.types("offbeat", "plan", "own.py", "--cluster", "profile.toml", "--workers", "8,64")
    assert "8 workers" in planned or re.search(r"^\s*8\b", planned, re.MULTILINE), planned
    assert "dasgd" in planned
    inside = person.types("python", "-c", "import offbeat; print(offbeat.__file__)")
    assert Path(inside.strip()).is_relative_to(person.folder), "it was this clone that was tried"
