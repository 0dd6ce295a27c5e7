"""Three ranks with four sequences to share: two, two and none; of four, five or eight rows: some ranks have none."""

import pytest

from spes_p2p.testing.ranks import SPREAD_RUN, CpuTeam, largest_difference, trainer_on
from spes_p2p.testing.training import genesis_round, tiny_documents
from spes_p2p.training.engine import Engine
from spes_p2p.training.ranks import local_rows, parts

pytestmark = pytest.mark.live


@pytest.fixture
def team(tmp_path):
    team = CpuTeam(tmp_path, 3)
    yield team
    team.close()


def test_a_rank_without_sequences_helps_and_counts_for_nothing(team: CpuTeam):
    spread = trainer_on(team.engine(frozen_format="int8", moments="int8"))
    alone = trainer_on(Engine(SPREAD_RUN, frozen_format="int8"), team.micro_alone)
    for trainer in (spread, alone):
        trainer.load_start(genesis_round(SPREAD_RUN, (0, 5)))
        trainer.train(2)
    assert largest_difference(spread, alone) < 1e-5
    assert spread.evaluate(tiny_documents()).nats_per_byte == pytest.approx(
        alone.evaluate(tiny_documents()).nats_per_byte, rel=1e-6
    )


class Rank:
    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
@pytest.mark.parametrize("num_sequences", [1, 4, 7, 8])
def test_ranks_share_a_batch_in_as_many_pieces_each(num_sequences, micro, count):
    of_ranks = [list(parts(num_sequences, micro, Rank(index, count))) for index in range(count)]
    assert len({len(pieces) for pieces in of_ranks}) == 1
    counted = [piece.rows for pieces in of_ranks for piece in pieces if piece.counts]
    assert [row for rows in counted for row in range(rows.start, rows.stop)] == list(range(num_sequences))
    assert all(1 <= piece.rows.stop - piece.rows.start <= micro for pieces in of_ranks for piece in pieces)


def test_rows_are_shared_as_torch_chunks_them():
    assert [local_rows(5, index, 4) for index in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]
