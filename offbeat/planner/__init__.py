"""What a protocol will do on a cluster, before and while it runs: costs of a model, closed forms, plans."""
