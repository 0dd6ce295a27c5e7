"""The bootstrap node: introduces peers, holds no authority. Import it as `spes_p2p.bootstrap`."""

if __name__ == "bootstrap":
    raise ImportError("import spes_p2p.bootstrap instead: `bootstrap` is a folder of the package spes_p2p")
