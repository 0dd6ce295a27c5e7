"""Wrong variants of the real code: each breaks one rule, and the tests that it names must fail while it is in place.

A simulator that finds nothing proves nothing. `Mutant.applied` patches the classes and functions of the product for the
length of a `with` block, and puts everything back. `caught_by` names tests as `file under tests/::function`; the suite
(`pytest -m mutant`) runs each with and without its mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spes_p2p.testing import mutations as wrong
from spes_p2p.testing.mutations import Patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One wrong rule."""

    patches: Callable[[], list[Patch]]
    """One of `mutations`."""
    caught_by: tuple[str, ...]
    """Tests that fail with it: `path under tests/::function`."""

    @property
    def name(self) -> str:
        """The name of the mutation."""
        return self.patches.__name__

    @property
    def sentence(self) -> str:
        """What the wrong code does."""
        return (self.patches.__doc__ or "").splitlines()[0]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The code is wrong inside the block."""
        before: list[Patch] = []
        try:
            for owner, name, instead in self.patches():
                before.append((owner, name, vars(owner)[name]))
                setattr(owner, name, instead)
            yield
        finally:
            for owner, name, right in reversed(before):
                setattr(owner, name, right)


_SPLIT = "simulation/scenarios/test_split_votes.py::"
_CRASH = "simulation/scenarios/test_crash_after_send.py::"
_LEADERS = "simulation/scenarios/test_lying_leaders.py::"
_UPDATES = "simulation/scenarios/test_false_updates.py::"
_LINES = "simulation/scenarios/test_bad_lines.py::"
_STATE = "simulation/scenarios/test_agreed_state.py::"
_BRANCHES = "simulation/scenarios/test_tentative_branches.py::"
_VOTING = "unit/protocol/test_voting.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        patches=wrong.small_quorum,
        caught_by=(
            _SPLIT + "test_two_valid_bodies_for_one_view_make_one_certificate_of_four",
            _SPLIT + "test_twins_with_one_key_on_both_sides_of_a_partition_certify_on_one_side_only",
        ),
    ),
    Mutant(
        patches=wrong.no_lock,
        caught_by=(_SPLIT + "test_a_lock_keeps_what_one_voter_decided_unseen",),
    ),
    Mutant(
        patches=wrong.eternal_lock,
        caught_by=(_VOTING + "test_a_lock_yields_to_a_quorum_certificate_of_a_later_view",),
    ),
    Mutant(
        patches=wrong.local_checks_of_a_qc,
        caught_by=(_VOTING + "test_local_knowledge_does_not_count_against_a_quorum_certificate",),
    ),
    Mutant(
        patches=wrong.views_add_up,
        caught_by=(_VOTING + "test_votes_of_different_views_do_not_add_up",),
    ),
    Mutant(
        patches=wrong.early_views,
        caught_by=(_VOTING + "test_a_view_is_not_entered_with_less_than_a_quorum",),
    ),
    Mutant(
        patches=wrong.held_unseen,
        caught_by=(
            _SPLIT + "test_a_result_that_nobody_can_get_is_not_certified_before_an_honest_peer_has_made_it",
            _VOTING + "test_a_voter_without_the_blobs_waits_for_f_plus_one_that_hold",
        ),
    ),
    Mutant(
        patches=wrong.liars_believed,
        caught_by=(_VOTING + "test_a_voter_without_the_blobs_waits_for_f_plus_one_that_hold",),
    ),
    Mutant(
        patches=wrong.qc_without_holders,
        caught_by=(_STATE + "test_a_quorum_certificate_of_too_few_holders_is_refused",),
    ),
    Mutant(
        patches=wrong.no_forwarding,
        caught_by=(_LINES + "test_rounds_end_where_nobody_hears_a_quorum_directly",),
    ),
    Mutant(
        patches=wrong.no_journal,
        caught_by=(
            _CRASH + "test_a_voter_that_dies_after_its_first_manifest_publishes_no_other",
            _VOTING + "test_after_a_restart_the_same_bytes_leave_again_and_the_lock_stands",
        ),
    ),
    Mutant(
        patches=wrong.journal_after_send,
        caught_by=(
            _CRASH + "test_a_voter_that_dies_after_its_first_manifest_publishes_no_other",
            _CRASH + "test_a_leader_that_dies_after_its_first_cut_names_no_other",
        ),
    ),
    Mutant(
        patches=wrong.second_manifest_acked,
        caught_by=(
            "unit/protocol/test_updates.py::test_after_a_restart_no_other_manifest_of_the_slot_is_acknowledged",
        ),
    ),
    Mutant(
        patches=wrong.receipt_of_one_ack,
        caught_by=(_UPDATES + "test_an_update_with_one_ack_fewer_than_it_needs_is_alive_and_no_more",),
    ),
    Mutant(
        patches=wrong.update_without_receipt,
        caught_by=(_UPDATES + "test_a_leader_that_names_an_update_without_receipt_loses_its_view",),
    ),
    Mutant(
        patches=wrong.acks_of_all_members,
        caught_by=(_STATE + "test_acks_of_members_that_are_not_eligible_make_no_receipt",),
    ),
    Mutant(
        patches=wrong.stale_fencing_token,
        caught_by=(
            _UPDATES + "test_an_update_from_another_certificate_is_in_no_cut",
            "unit/protocol/test_statements.py::test_an_update_is_bound_to_the_certificate_it_was_trained_from",
        ),
    ),
    Mutant(
        patches=wrong.inclusion_by_hash,
        caught_by=(_VOTING + "test_any_statement_of_the_slot_satisfies_the_inclusion_rule",),
    ),
    Mutant(
        patches=wrong.omission_allowed,
        caught_by=(
            _LEADERS + "test_a_leader_that_omits_a_receipt_everybody_held_loses_its_view",
            _LEADERS + "test_a_leader_that_cuts_before_the_fast_peers_are_in_loses_its_view",
        ),
    ),
    Mutant(
        patches=wrong.hurry_allowed,
        caught_by=(_LEADERS + "test_a_leader_that_cuts_at_once_among_equals_delays_nobodys_update",),
    ),
    Mutant(
        patches=wrong.kept_on_trust,
        caught_by=(_LEADERS + "test_a_leader_that_keeps_parts_without_need_loses_its_view",),
    ),
    Mutant(
        patches=wrong.one_digest,
        caught_by=(_STATE + "test_a_part_that_one_aggregator_vouches_for_is_not_prevoted",),
    ),
    Mutant(
        patches=wrong.no_recheck,
        caught_by=(_VOTING + "test_a_part_that_this_voter_recomputed_otherwise_gets_nil",),
    ),
    Mutant(
        patches=wrong.lease_by_arrival,
        caught_by=(_STATE + "test_leases_are_the_same_in_whatever_order_the_claims_arrive",),
    ),
    Mutant(
        patches=wrong.anybody_delivers,
        caught_by=("unit/protocol/test_transition.py::test_nobody_publishes_for_a_shard_of_another",),
    ),
    Mutant(
        patches=wrong.evidence_ignored,
        caught_by=(
            _SPLIT + "test_who_voted_for_both_bodies_is_evicted_by_its_signature_in_the_certificate",
            _UPDATES + "test_an_author_of_two_manifests_is_out_with_the_next_roster_and_its_vote_is_gone",
        ),
    ),
    Mutant(
        patches=wrong.liars_return,
        caught_by=(
            _UPDATES + "test_who_was_evicted_for_two_manifests_asks_in_vain_to_join_again",
            "unit/protocol/test_returning_liars.py::test_who_remembers_a_proof_accuses_again_when_the_join_comes",
        ),
    ),
    Mutant(
        patches=wrong.growth_unlimited,
        caught_by=("unit/protocol/test_roster.py::test_voters_grow_by_one_or_a_quarter_a_round",),
    ),
    Mutant(
        patches=wrong.one_silent_round,
        caught_by=("unit/protocol/test_roster.py::test_two_cuts_without_an_item_end_the_membership",),
    ),
    Mutant(
        patches=wrong.merged_for_ever,
        caught_by=(_STATE + "test_merged_values_last_for_one_round_only",),
    ),
    Mutant(
        patches=wrong.tentative_votes_count,
        caught_by=(_BRANCHES + "test_a_tentative_vote_does_not_count_in_a_final_quorum",),
    ),
    Mutant(
        patches=wrong.detour_unlocks,
        caught_by=(_BRANCHES + "test_a_lock_outlives_a_tentative_detour",),
    ),
    Mutant(
        patches=wrong.tentative_leave,
        caught_by=(_BRANCHES + "test_a_tentative_certificate_lets_nobody_leave",),
    ),
    Mutant(
        patches=wrong.fork_by_arrival,
        caught_by=(_BRANCHES + "test_two_branches_of_two_founders_become_one_whatever_came_first",),
    ),
    Mutant(
        patches=wrong.tentative_without_end,
        caught_by=(_BRANCHES + "test_a_half_of_four_voters_stops_after_as_many_certificates_as_it_may_make",),
    ),
    Mutant(
        patches=wrong.recovery_by_anybody,
        caught_by=(_BRANCHES + "test_a_recovery_that_another_key_signed_is_nothing",),
    ),
    Mutant(
        patches=wrong.final_left,
        caught_by=(_BRANCHES + "test_a_final_certificate_is_left_for_no_tentative_one",),
    ),
    Mutant(
        patches=wrong.leases_of_a_branch_stay,
        caught_by=(_BRANCHES + "test_a_shard_that_others_trained_meanwhile_goes_back_to_its_owner",),
    ),
)
