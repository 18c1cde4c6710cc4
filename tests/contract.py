"""The contract: what every engine must do. An engine's test module derives from `Contract` and gives it
the fixture `engine` (see `engines.py`)."""

from __future__ import annotations

from tests.contract_asynchronous import Asynchronous
from tests.contract_auto import AutoContract
from tests.contract_checkpoints import Checkpoints
from tests.contract_endings import Endings
from tests.contract_misuse import Misuse
from tests.contract_parity import Parity
from tests.contract_semantics import Semantics
from tests.contract_shards import Shards
from tests.contract_stragglers import StragglersContract
from tests.contract_training import Training


class Contract(
    AutoContract,
    Parity,
    Semantics,
    Training,
    Endings,
    Checkpoints,
    Misuse,
    Shards,
    Asynchronous,
    StragglersContract,
):
    """Everything."""
