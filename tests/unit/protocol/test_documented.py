import inspect
import re
from pathlib import Path

import pytest

from spes_p2p.config import ProtocolConfig
from spes_p2p.protocol import body, messages, questions
from spes_p2p.protocol.wire import RefusalReason, Wire

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
MESSAGES = sorted(
    name
    for module in (body, messages, questions)
    for name, value in vars(module).items()
    if inspect.isclass(value) and issubclass(value, Wire) and value.__module__ == module.__name__
)


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_is_documented(name: str) -> None:
    assert re.search(rf"`{name}(s|\{{|`)", PAGE) or f"`{name}`" in PAGE


@pytest.mark.parametrize("name", sorted(ProtocolConfig.model_fields))
def test_every_parameter_is_documented(name: str) -> None:
    section = PAGE.split("## 3.")[1].split("## 4.")[0]
    assert f"`{name}`" in section


@pytest.mark.parametrize("reason", sorted(reason.name for reason in RefusalReason))
def test_every_reason_is_documented(reason: str) -> None:
    assert re.search(rf"\b{reason}\b", PAGE)


def test_every_section_that_the_code_names_exists() -> None:
    package = Path(inspect.getfile(messages)).parent
    named = {
        number
        for path in sorted(package.glob("*.py"))
        for number in re.findall(r"docs/protocol\.md, sections? (\d+)", path.read_text())
    }
    assert named != set()
    assert all(f"\n## {number}. " in PAGE for number in named)
