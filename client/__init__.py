"""The volunteer's client: commands and the terminal UI. Import it as `spes_p2p.client`."""

if __name__ == "client":
    raise ImportError("import spes_p2p.client instead: `client` is a folder of the package spes_p2p")
