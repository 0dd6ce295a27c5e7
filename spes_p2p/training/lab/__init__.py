"""The laboratory: ways to train one model on the text of several peers, compared at equal tokens in one process.

No network and no round protocol: who delivers, and when, is decided by the caller. All else is what a swarm runs: the
trainer, codecs, means, merge and blobs of this package.

    experiment.py   what one experiment is, and what came out of it
    texts.py        text of several kinds that every machine has, dealt alike or by kind
    streams.py      several peers' text for one trainer
    rounds.py       SPES, through the blobs of a swarm
    swarms.py       SPES and those that it is compared with, one way to make a round
    running.py      one experiment from its text to its curve
    table.py        means over seeds, and what may be claimed of them
    curves.py       pictures
"""
