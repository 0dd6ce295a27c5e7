"""A rank that ends takes the trainer with it, with its reason, and none outlives the trainer."""

import os
import signal
import subprocess
import sys

import pytest

from spes_p2p.node.ranks import RANK_COMMAND
from spes_p2p.testing.ranks import SPREAD_RUN, CpuTeam, trainer_on
from spes_p2p.testing.training import genesis_round
from spes_p2p.training.orders import Gather
from spes_p2p.training.spread import RankFailure

pytestmark = pytest.mark.live

WAIT_S = 120.0


@pytest.fixture
def team(tmp_path):
    team = CpuTeam(tmp_path, 2)
    yield team
    team.close()


def test_a_rank_that_is_killed_ends_the_exchange_with_its_reason(team: CpuTeam):
    trainer = trainer_on(team.engine())
    trainer.load_start(genesis_round(SPREAD_RUN))
    with pytest.raises(RankFailure, match="cpu: "):
        trainer.train(1000, on_step=lambda report: os.kill(team.processes.pids[0], signal.SIGKILL))
    assert team.died.wait(WAIT_S)
    assert team.reasons == ["the trainer's process of cpu: ended by SIGKILL"]


def test_a_rank_that_fails_says_why(team: CpuTeam):
    team.engine()
    team.processes.tell(Gather(names=("no.such.weight",)))
    assert team.died.wait(WAIT_S)
    assert team.reasons == ["the trainer's process of cpu: KeyError: 'no.such.weight'"]


def test_the_default_is_to_end_the_process_with_the_reason_last_in_the_log():
    script = "from spes_p2p.node.ranks import die; die('cuda:1 is gone')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"cuda:1 is gone\n")


def test_a_rank_ends_when_its_input_does():
    with subprocess.Popen((*RANK_COMMAND, "--parent", str(os.getpid())), stdin=subprocess.PIPE) as rank:
        rank.stdin.close()
        assert rank.wait(WAIT_S) == 0


def test_a_rank_whose_parent_is_another_does_not_start():
    with subprocess.Popen((*RANK_COMMAND, "--parent", "1"), stdin=subprocess.PIPE) as rank:
        assert rank.wait(WAIT_S) == 0
