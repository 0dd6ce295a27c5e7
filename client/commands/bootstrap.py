"""`spes-p2p bootstrap`: an entry point that introduces peers to each other."""

from __future__ import annotations

from spes_p2p.bootstrap import flags
from spes_p2p.bootstrap.cli import default_data_dir, run_bootstrap
from spes_p2p.bootstrap.options import BootstrapOptions
from spes_p2p.client.commands.options import Announce, Bootstrap, DataDir, Json, Listen, LogJson, Tied
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.client.tie import tie_to_parent


def bootstrap(
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    data_dir: DataDir = None,
    json: Json = False,
    metrics: flags.Metrics = flags.DEFAULT_METRICS_FLAG,
    mirror: flags.Mirror = None,
    cache: flags.Cache = None,
    peer_requests: flags.PeerRequests = flags.DEFAULT_REQUESTS,
    peer_rate: flags.PeerRate = None,
    all_requests: flags.AllRequests = flags.DEFAULT_ALL_REQUESTS,
    all_rate: flags.AllRate = None,
    log_file: flags.LogFilePath = None,
    log_size: flags.LogSize = None,
    log_keep: flags.LogKeep = flags.DEFAULT_LOG_KEEP,
    log_json: LogJson = False,
    tied: Tied = False,
) -> int:
    """Run a bootstrap node: it introduces peers to each other, relays for those behind routers, and decides nothing.

    The first lines it prints are its addresses, for invite links and --bootstrap. Ctrl-C ends it.

    Example: spes-p2p bootstrap --listen /ip4/0.0.0.0/tcp/31337 --announce /dns4/boot.example.org/tcp/31337
    """
    choices = choose(from_flags(data_dir=data_dir, listen=listen, announce=announce, bootstrap=bootstrap))
    options = BootstrapOptions(
        data_dir=choices.data_dir or default_data_dir(),
        listen=choices.listen or (),
        announce=choices.announce or (),
        peers=choices.bootstrap or (),
        metrics=metrics,
        quotas=flags.quota_limits(peer_requests, peer_rate, all_requests, all_rate),
        cache_bytes=flags.cache_bytes(cache),
        mirror_bytes=flags.size_of("--mirror", mirror, 0),
    )
    options.check()
    with flags.logged(flags.log_lines(log_file, log_size, log_keep), as_json=log_json):
        if tied:
            tie_to_parent()
        return run_bootstrap(options, as_json=json)
