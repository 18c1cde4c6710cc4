"""All items, in the order of the papers."""

from __future__ import annotations

from reproduce import costs, dasgd, end_to_end, forms, startup, stragglers, sync_switch
from reproduce.item import Item

_ALL = (
    *sync_switch.ITEMS,
    *end_to_end.ITEMS,
    *costs.ITEMS,
    startup.ITEM,
    stragglers.ITEM,
    *dasgd.ITEMS,
    *forms.ITEMS,
)
ORDER = (
    "sync-switch-fig5",
    "sync-switch-fig6",
    "sync-switch-fig7",
    "sync-switch-momentum",
    "sync-switch-table1",
    "sync-switch-fig11",
    "sync-switch-fig12",
    "sync-switch-fig13",
    "sync-switch-fig14",
    "sync-switch-fig15",
    "sync-switch-table2",
    "sync-switch-table3",
    "dasgd-fig4",
    "dasgd-table1",
    "dasgd-fig5",
    "dasgd-fig6",
    "dasgd-fig7",
    "dasgd-table2",
)
ITEMS: dict[str, Item] = {name: next(one for one in _ALL if one.name == name) for name in ORDER}
assert len(ITEMS) == len(_ALL)
