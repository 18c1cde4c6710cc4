"""The examples: what README shows of them, and the parts that they build on."""

from __future__ import annotations

import difflib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """The modules that the scripts in `examples/` import, imported as those do."""
    sys.path.insert(0, str(EXAMPLES))
    import cifar_data
    import models

    yield {"data": cifar_data, "models": models}
    sys.path.remove(str(EXAMPLES))
    del sys.modules["cifar_data"], sys.modules["models"]


def difference() -> str:
    """What changes from `plain_ddp.py` to `offbeat_version.py`: the changed lines alone, a blank line
    between places."""
    before, after = (
        (EXAMPLES / name).read_text().splitlines() for name in ("plain_ddp.py", "offbeat_version.py")
    )
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[3:]
    return "\n".join("" if line.startswith("@@") else line for line in lines)


def test_readme_shows_the_difference_between_plain_and_offbeat() -> None:
    shown = (ROOT / "README.md").read_text().split("```diff\n")
    assert len(shown) == 2, "README.md shows one ```diff block"
    assert shown[1].split("\n```")[0] == difference()


def test_readme_s_loop_runs(tmp_path: Path) -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "loop.py").write_text(code)
    found = run(str(tmp_path / "loop.py"), folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    assert (tmp_path / "checkpoint.pt").is_file()


def test_the_difference_is_small() -> None:
    changed = [line for line in difference().splitlines() if line]
    assert sum(line.startswith("+") for line in changed) <= 10
    assert len(changed) <= 27


@pytest.mark.parametrize(("name", "width", "count"), [("resnet32", 16, 464_154), ("resnet8", 32, 308_266)])
def test_parameter_counts(examples: dict[str, ModuleType], name: str, width: int, count: int) -> None:
    """He et al.'s table gives 0.46 M for ResNet-32."""
    make = examples["models"].MODELS[name]
    assert sum(p.numel() for p in make().parameters()) == count
    assert sum(p.numel() for p in make(width=width).parameters()) == count
    assert sum(p.numel() for p in make(width=8).parameters()) < count / 3


@pytest.mark.parametrize(("name", "layers"), [("resnet32", 32), ("resnet8", 8)])
def test_models_compute(examples: dict[str, ModuleType], name: str, layers: int) -> None:
    model = examples["models"].MODELS[name](width=4)
    weighted = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert sum(m.weight.shape[-1] != 1 or m.weight.dim() == 2 for m in weighted) == layers
    output = model(torch.randn(2, 3, 32, 32))
    assert output.shape == (2, 10)
    F.cross_entropy(output, torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_augmented_images_are_crops_and_half_of_them_flipped(examples: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (400, 3, 6, 5), dtype=torch.uint8)
    found = examples["data"].augment(images, padding=2)
    assert found.shape == images.shape
    assert found.dtype == torch.uint8
    flips, places = 0, set()
    for before, after in zip(images, found, strict=True):
        padded = F.pad(before, (2, 2, 2, 2))
        crops = {(i, j): padded[:, i : i + 6, j : j + 5] for i in range(5) for j in range(5)}
        straight = [place for place, crop in crops.items() if torch.equal(crop, after)]
        flipped = [place for place, crop in crops.items() if torch.equal(crop.flip(2), after)]
        assert len(straight) + len(flipped) == 1
        flips += len(flipped)
        places.update(straight + flipped)
    assert 150 < flips < 250
    assert len(places) == 25


def test_augmentation_follows_torchs_generator(examples: dict[str, ModuleType]) -> None:
    images = torch.rand(8, 3, 32, 32)
    torch.manual_seed(1)
    first = examples["data"].augment(images)
    torch.manual_seed(1)
    assert torch.equal(first, examples["data"].augment(images))
    assert not torch.equal(first, examples["data"].augment(images))


def test_normalization(examples: dict[str, ModuleType]) -> None:
    data = examples["data"]
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    found = data.normalize(images)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[1, 2, 3, 4].item(), (images[1, 2, 3, 4].item() / 255 - 0.4465) / 0.2616)


def write_parquet(
    folder: Path,
    split: str,
    pixels: np.ndarray,
    labels: list[int],
    column: str = "img",
    label: str = "label",
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    rows = []
    for picture in pixels:
        out = io.BytesIO()
        image.fromarray(picture).save(out, "PNG")
        rows.append({"bytes": out.getvalue(), "path": None})
    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({column: rows, label: pyarrow.array(labels, pyarrow.int64())})
    parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "offbeat"


@pytest.mark.parametrize(("folder", "column"), [("plain_text", "img"), (".", "image")])
def test_parquet_is_read_and_cached(
    examples: dict[str, ModuleType], tmp_path: Path, cache: Path, folder: str, column: str
) -> None:
    data = examples["data"]
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    write_parquet(tmp_path / folder, "train", pixels, [3, 1, 4, 1, 5], column)
    for _ in range(2):
        images, labels = data.load(tmp_path, "train")
        assert torch.equal(images, torch.from_numpy(pixels).permute(0, 3, 1, 2))
        assert labels.tolist() == [3, 1, 4, 1, 5]
        assert labels.dtype == torch.int64
    (cached,) = cache.glob("*.npz")
    assert not list(cache.glob("*.part"))

    cached.write_bytes(cached.read_bytes()[:200])
    assert torch.equal(data.load(tmp_path, "train")[0], images), "a damaged cache is made anew"

    write_parquet(tmp_path / folder, "train", pixels[:2], [7, 7], column)
    assert data.load(tmp_path, "train")[1].tolist() == [7, 7], "other files have another cache"


def test_the_labels_of_cifar_100_are_the_fine_ones(
    examples: dict[str, ModuleType], tmp_path: Path, cache: Path
) -> None:
    write_parquet(tmp_path, "train", np.zeros((2, 32, 32, 3), np.uint8), [99, 7], label="fine_label")
    assert examples["data"].load(tmp_path, "train")[1].tolist() == [99, 7]


def test_parquet_without_a_place_for_the_cache(
    examples: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_parquet(tmp_path, "test", np.zeros((1, 32, 32, 3), np.uint8), [0])
    assert examples["data"].load(tmp_path, "test")[0].shape == (1, 3, 32, 32)


def test_parquet_of_something_else(examples: dict[str, ModuleType], tmp_path: Path, cache: Path) -> None:
    write_parquet(tmp_path, "test", np.zeros((1, 32, 32, 3), np.uint8), [0], column="text")
    with pytest.raises(ValueError, match=r"has the columns \['text', 'label'\]"):
        examples["data"].load(tmp_path, "test")


def test_missing_data_says_what_to_download(examples: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no train-\*.parquet in .*Download the dataset"):
        examples["data"].load(tmp_path, "train")


def run(script: str, *args: object, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One worker runs an example, in a folder of its own."""
    return subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        timeout=300,
    )


def accuracy(found: subprocess.CompletedProcess[str]) -> float:
    """The last one that an example printed."""
    assert found.returncode == 0, found.stderr
    return float(found.stdout.rsplit("accuracy ", 1)[1].split()[0])


def test_cifar10_without_data_ends_with_one_line(tmp_path: Path) -> None:
    found = run("cifar10.py", "--data", tmp_path / "nowhere", folder=tmp_path)
    assert found.returncode == 1
    assert found.stderr.startswith("cifar10.py: no train-*.parquet in")
    assert len(found.stderr.splitlines()) == 1


def test_cifar10_runs(tmp_path: Path, cache: Path) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        pixels = random.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
        write_parquet(tmp_path / "data", split, pixels, list(range(10)) + [0] * 14)
    options = ["--data", tmp_path / "data", "--width", 4, "--subset", 20, "--epochs", 2, "--batch-size", 5]
    found = run("cifar10.py", *options, "--schedule", "step", folder=tmp_path)
    assert 0 <= accuracy(found) <= 1


def test_digits_learn(tmp_path: Path) -> None:
    found = run("digits.py", "--epochs", 2, folder=tmp_path)
    assert accuracy(found) > 0.9
    assert len(found.stdout.splitlines()) == 10, "every tenth, the last one included"


def test_offbeat_version_learns(tmp_path: Path) -> None:
    assert accuracy(run("offbeat_version.py", folder=tmp_path, OFFBEAT_TOTAL="120")) > 0.8


@pytest.mark.slow
def test_plain_ddp_learns(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert accuracy(run("plain_ddp.py", folder=tmp_path, **env)) > 0.9
