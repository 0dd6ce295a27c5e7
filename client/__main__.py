"""`python -m spes_p2p.client`: the `spes-p2p` command."""

from spes_p2p.client.cli import main

if __name__ == "__main__":
    main()
