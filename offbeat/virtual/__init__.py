"""Virtual clusters: the same script, or the protocols alone, in virtual time."""
