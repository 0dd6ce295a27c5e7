"""What makes a certificate final or tentative, from the certificates alone: S3 and S10 of `invariants`.

Nothing here asks the code that the peers run whether a quorum is one: signatures are counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import bits, body_hash, encode
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Vote
from spes_p2p.protocol.params import MIN_BYZANTINE_VOTERS, faults, quorum
from spes_p2p.protocol.recovery import SIGNATURE_TAG
from spes_p2p.protocol.wire import Step


def link_problem(before: Head, head: Head, certificate: Certificate, heads: Sequence[Head]) -> str:
    """S3: how a certificate does not extend the chain of a peer with these heads; empty: it does.

    A final one follows the last final one over the tip that `via` names, and nothing final is ever left.
    """
    body = certificate.body
    newest = next(known for known in reversed(heads) if known.is_final)
    links = (before.last_final.hash, before.height) if body.final else (before.hash, head.height)
    if before.last_final.hash != newest.hash:
        return f"round {head.round} passes over the final round {newest.round}"
    if head.round != before.round + 1 or (body.prev, before.height) != links:
        return f"round {head.round} is on top of another chain"
    return ""


def left_problem(heads: Sequence[Head], abandoned: Iterable[Digest]) -> str:
    """S3, S10: what is wrong with leaving these certificates; empty: nothing."""
    known = {head.hash: head for head in heads}
    finals = [known[identity].round for identity in abandoned if identity in known and known[identity].is_final]
    return f"leaves the final round {finals[0]}" if finals else ""


def quorum_problem(before: Head, head: Head, certificate: Certificate, verifier: Verifier) -> str:
    """S10: why the signatures do not make this certificate; empty: they do.

    A final one needs q precommits of all voters in the final ballot of the height, or the recovery key; a tentative
    one those of its side in a ballot of its own, more than f of all voters and fewer than q.
    """
    body, voters = certificate.body, before.last_final.state.voters
    if body.epoch > before.epoch:
        key = before.run.manifest.recovery_key
        signed = [verifier(key, SIGNATURE_TAG, body_hash(body), one) for one in certificate.signatures]
        return "" if signed == [True] else "a recovery that the key did not sign"
    if body.final:
        round_number, branch, electorate, needed = before.height, b"", voters, quorum(len(voters))
    else:
        electorate = tuple(voters[place] for place in sorted(bits(body.side, len(voters))))
        round_number, branch = head.round, Terms(before, electorate).branch
        needed = max(quorum(len(electorate)), faults(len(voters)) + 1)
        if not branch or len(electorate) >= quorum(len(voters)):
            return f"a tentative certificate of {len(electorate)} of {len(voters)} voters"
    vote = Vote(body.run, body.epoch, round_number, certificate.view, Step.PRECOMMIT, head.hash, False, branch)
    payload = encode(vote)
    signers = [electorate[place] for place in sorted(bits(certificate.voters, len(electorate)))]
    right = [
        peer
        for peer, signature in zip(signers, certificate.signatures, strict=True)
        if verifier(peer, Vote.tag, payload, signature)
    ]
    return "" if len(right) >= needed else f"{len(right)} of {needed} precommits of its ballot"


def tentative_problem(head: Head) -> str:
    """S10: what a tentative certificate changed that it may not; empty: nothing."""
    if head.is_final:
        return ""
    trunk = head.last_final
    if (head.state.members, head.state.voters) != (trunk.state.members, trunk.state.voters):
        return "a tentative certificate changes the roster"
    most = head.run.config.protocol.max_tentative
    number = head.round - trunk.round
    if len(trunk.state.voters) >= MIN_BYZANTINE_VOTERS and number > most:
        return f"{number} tentative certificates of at most {most}"
    return ""


def was_silent(peer: PeerId, cuts: Sequence[frozenset[PeerId]], silent_rounds: int) -> bool:
    """S9: whether a peer has no item in any of the last final cuts. `cuts`: who has one, the newest last."""
    return len(cuts) >= silent_rounds and not any(peer in present for present in cuts[-silent_rounds:])
