"""Checkpoints: a resumed run equals the one that saved, and nothing else is ever loaded."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import journal
from tests import scripts, scripts_checkpoints
from tests.contract_parity import all_hold_the_same, same_traces
from tests.engines import Died, RemoteError
from tests.scripts import Setup


class Checkpoints:
    @pytest.mark.parametrize("loop", ["own", "batches", "loader"])
    @pytest.mark.parametrize(
        ("plan", "at"),
        [
            ("bsp", 5),
            ("local(3)", 4),
            ("dasgd(4,2)", 5),
            ("dasgd(4,3,0.5,delta)", 8),
            ("bsp:25% dasgd(3,2)", 6),
        ],
    )
    def test_a_resumed_run_equals_the_run_that_saved(
        self, engine: Any, tmp_path: Path, loop: str, plan: str, at: int
    ) -> None:
        setup = Setup(plan, 24, "dropout", momentum=0.9, dtype=torch.float32)
        path = str(tmp_path / "job.pt")
        saved = engine.run(2, scripts_checkpoints.saves, setup, path, at, loop)
        resumed = engine.run(2, scripts_checkpoints.resumes, setup, path, loop)
        same_traces(saved, resumed)
        all_hold_the_same(saved + resumed)
        for a, b in zip(saved, resumed, strict=True):
            assert b.notes["begun"] == 2 * at
            assert a.notes["random"] == b.notes["random"]

    def test_a_resumed_run_goes_on_after_a_switch_with_its_policy(self, engine: Any, tmp_path: Path) -> None:
        options = {"momentum": "ramp", "lr_reference": "worker", "warmup": 0.5}
        setup = Setup("bsp:25% local(3)", 48, "mlp", "adam", dtype=torch.float32, options=options)
        for at in (4, 6, 7, 9):
            path = str(tmp_path / f"{at}.pt")
            saved = engine.run(2, scripts_checkpoints.saves, setup, path, at, "own", scripts.half_cosine)
            same_traces(
                saved, engine.run(2, scripts_checkpoints.resumes, setup, path, "own", scripts.half_cosine)
            )

    def test_one_worker_resumes_to_the_bit(self, engine: Any, tmp_path: Path) -> None:
        for loop in ("batches", "loader"):
            setup, path = (
                Setup("local(3)", 24, "dropout", momentum=0.9, dtype=torch.float32),
                str(tmp_path / loop),
            )
            saved = engine.run(1, scripts_checkpoints.saves, setup, path, 7, loop)
            same_traces(saved, engine.run(1, scripts_checkpoints.resumes, setup, path, loop))

    @pytest.mark.parametrize("workers", [1, 3])
    def test_another_worker_count_works_and_is_said(self, engine: Any, tmp_path: Path, workers: int) -> None:
        setup = Setup("bsp:25% dasgd(4,2)", 40, "dropout", momentum=0.9, dtype=torch.float32)
        path = str(tmp_path / "job.pt")
        engine.run(2, scripts_checkpoints.saves, setup, path, 6, "batches")
        found = engine.run(workers, scripts_checkpoints.resumes, setup, path, "batches")
        all_hold_the_same(found)
        assert found[0].notes["begun"] == 12
        assert 40 <= found[0].units < 40 + workers
        assert f"the number of workers was 2 and is {workers}" in engine.log(0)
        warnings = [row["message"] for row in journal.read(Path(engine.out)) if row["type"] == "warning"]
        assert any(f"workers was 2 and is {workers}" in text for text in warnings)

    def test_files_that_do_not_fit_are_refused_and_nothing_is_touched(
        self, engine: Any, tmp_path: Path
    ) -> None:
        setup = Setup("local(3)", 20, "mlp", momentum=0.9)
        good = tmp_path / "good.pt"
        engine.run(2, scripts_checkpoints.saves, setup, str(good), 4, "own")
        engine.run(
            2, scripts_checkpoints.saves, replace(setup, model="plain"), str(tmp_path / "model.pt"), 4, "own"
        )
        engine.run(
            2,
            scripts_checkpoints.saves,
            replace(setup, optimizer="adam"),
            str(tmp_path / "optimizer.pt"),
            4,
            "own",
        )
        whole = good.read_bytes()
        for share in (0.0, 0.1, 0.5, 0.9, 0.999):
            (tmp_path / f"cut{share}.pt").write_bytes(whole[: int(share * len(whole))])
        with zipfile.ZipFile(good) as archive:
            parts = [part for part in archive.infolist() if part.file_size]
        for part in parts:
            names = struct.unpack_from("<HH", whole, part.header_offset + 26)  # lengths of name and padding
            flipped = bytearray(whole)
            flipped[part.header_offset + 30 + sum(names) + part.file_size // 2] ^= 0x10
            (tmp_path / f"flip-{part.filename.replace('/', '-')}.pt").write_bytes(flipped)
        torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
        torch.save([1, 2], tmp_path / "list.pt")
        (tmp_path / "text.pt").write_text("not a checkpoint")
        content = torch.load(good, weights_only=True)
        torch.save({**content, "version": content["version"] + 1}, tmp_path / "newer.pt")
        torch.save({"format": content["format"], "version": content["version"]}, tmp_path / "hollow.pt")
        paths = [str(p) for p in sorted(tmp_path.glob("*.pt")) if p != good] + [str(tmp_path / "missing.pt")]
        paths.append(str(tmp_path))
        plain = engine.run(2, scripts.train, setup)
        found = engine.run(2, scripts_checkpoints.refuses, setup, paths)
        for rows, _ in found:
            for path, (kind, message, same) in zip(paths, rows, strict=True):
                assert (kind, same) == ("CheckpointError", True), (path, message)
                assert path in message
        same_traces(plain, [trained for _, trained in found])

    def test_a_directory_that_cannot_be_written_is_an_oserror_on_all(
        self, engine: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        setup = Setup("dasgd(4,2)", 20, momentum=0.9)
        found = engine.run(2, scripts_checkpoints.cannot_write, setup, str(tmp_path / "file" / "job.pt"))
        for name, message, _ in found:
            assert name != ""
            assert "job.pt" in message
        all_hold_the_same([one for _, _, one in found])
        assert found[0][2].units == 20

    def test_a_kill_while_saving_leaves_the_old_file_whole(self, engine: Any, tmp_path: Path) -> None:
        setup, path = Setup("bsp", 20, momentum=0.9), tmp_path / "job.pt"
        engine.run(2, scripts_checkpoints.saves, setup, str(path), 4, "own")
        before = path.read_bytes()
        zero, one = engine.outcomes(2, scripts_checkpoints.killed_while_saving, setup, str(path))
        assert zero == Died(0, -9)
        assert one.type == "PeerLost"
        assert path.read_bytes() == before
        engine.run(2, scripts_checkpoints.resumes, setup, str(path), "own")

    def test_also_is_saved_and_restored_on_all(self, engine: Any, tmp_path: Path) -> None:
        setup, path = Setup("bsp", 20), str(tmp_path / "job.pt")
        engine.run(2, scripts_checkpoints.saves_also, setup, path)
        assert engine.run(2, scripts_checkpoints.restores_also, setup, path) == [5, 5]
        for one in engine.outcomes(2, scripts_checkpoints.resumes, setup, path, "own"):
            assert one.type == "CheckpointError"
            assert "ramp" in one.message

    def test_rank_0_alone_may_save_after_the_end(self, engine: Any, tmp_path: Path) -> None:
        path = tmp_path / "job.pt"
        assert engine.run(2, scripts_checkpoints.saves_alone_at_the_end, Setup("bsp", 8), str(path)) == [1, 1]
        assert path.is_file()

    def test_saving_before_the_step_would_lose_a_gradient(self, engine: Any, tmp_path: Path) -> None:
        with pytest.raises(RemoteError, match="would lose the gradient"):
            engine.run(
                2, scripts_checkpoints.saves_before_the_step, Setup("bsp", 8), str(tmp_path / "job.pt")
            )
