"""What survives a kill: identity, blobs, journal and ledger on disk."""
