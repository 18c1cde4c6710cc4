"""What to do about stragglers: who is one, and what follows."""
