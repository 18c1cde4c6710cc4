"""CIFAR-10 from the parquet files of the Hugging Face hub, and its augmentation on whole batches."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MEAN = (0.4914, 0.4822, 0.4465)  # of the training images, by channel
STD = (0.2470, 0.2435, 0.2616)


def load(directory: Path | str, split: str) -> tuple[Tensor, Tensor]:
    """The images (uint8, [N, 3, 32, 32]) and labels (int64, [N]) of `split`, "train" or "test", from
    the parquet files `<split>-*.parquet` in `directory` or its folder `plain_text`.

    Images are decoded once: the result is kept in the user's cache, named after the files' sizes and
    times. Raises FileNotFoundError, which says what to download."""
    files = _files(Path(directory), split)
    cached = _cache_file(files, split)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with cached.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one worker of this machine decodes, the others wait
            arrays = _read_cache(cached)
            if arrays is None:
                arrays = decode(files)
                _write_cache(cached, *arrays)
    except OSError:  # no cache to write to: decode, every time
        arrays = decode(files)
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])


def decode(files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, 32, 32] and labels [N] of parquet files with the columns `img` (or `image`), a
    struct with the PNG's `bytes`, and `label` (CIFAR-100's: `fine_label`)."""
    import pyarrow.parquet
    from PIL import Image

    images, labels = [], []
    for file in files:
        table = pyarrow.parquet.read_table(file)
        column = next((name for name in ("img", "image") if name in table.column_names), None)
        label = next((name for name in ("label", "fine_label") if name in table.column_names), None)
        if column is None or label is None:
            raise ValueError(
                f"{file} has the columns {table.column_names}; CIFAR-10's files have 'img' and 'label'"
            )
        for row in table.column(column).to_pylist():
            images.append(np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")))
        labels.append(table.column(label).to_numpy())
    pixels = np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))
    return pixels, np.concatenate(labels).astype(np.int64)


def augment(images: Tensor, padding: int = 4) -> Tensor:
    """A random crop of every image after zero padding, then a flip for half of them: [N, C, H, W] of any
    dtype to the same. One gather for the whole batch, random numbers from torch's generator."""
    n, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    offsets = torch.randint(0, 2 * padding + 1, (2, n, 1), device=images.device)
    rows = offsets[0] + torch.arange(height, device=images.device)
    columns = offsets[1] + torch.arange(width, device=images.device)
    flipped = torch.rand(n, 1, device=images.device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    image = torch.arange(n, device=images.device).view(n, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, channels, 1, 1)
    return padded[image, channel, rows.view(n, 1, height, 1), columns.view(n, 1, 1, width)]


def normalize(images: Tensor) -> Tensor:
    """uint8 to float32 with mean 0 and standard deviation 1 by channel over the training set."""
    mean = torch.tensor(MEAN, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=images.device).view(1, 3, 1, 1)
    return (images.float() / 255 - mean) / std


def _files(directory: Path, split: str) -> list[Path]:
    for folder in (directory / "plain_text", directory):
        if files := sorted(folder.glob(f"{split}-*.parquet")):
            return files
    raise FileNotFoundError(
        f"no {split}-*.parquet in {directory} nor in its folder plain_text. Download the dataset "
        f"uoft-cs/cifar10 from the Hugging Face hub (its folder plain_text holds "
        f"train-00000-of-00001.parquet and test-00000-of-00001.parquet, 144 MB together), and name its "
        f"directory by --data or CIFAR10_DIR"
    )


def _cache_file(files: list[Path], split: str) -> Path:
    known = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "offbeat" / f"cifar10-{split}-{key}.npz"


def _read_cache(cached: Path) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        with np.load(cached, allow_pickle=False) as found:
            return found["images"], found["labels"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None  # not there, or damaged: it is made anew


def _write_cache(cached: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes beside and renames, so that a reader finds all of it or nothing."""
    handle, beside = tempfile.mkstemp(dir=cached.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            np.savez(out, images=images, labels=labels)
        os.replace(beside, cached)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
