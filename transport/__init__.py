"""How bytes move: frames, links, delivery, liveness, the ledger. Knows no torch and no method."""
