"""When to switch: the search for the smallest share of BSP, what it costs, and what it has found."""
