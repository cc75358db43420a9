"""What is raised can be told to the other side."""

from __future__ import annotations

import pytest

from edge_client.errors import Malformed


def test_a_refusal_has_one_word_as_its_code_and_its_message_begins_with_it() -> None:
    refused = Malformed("bad_field", "n is 0")
    assert (refused.code, refused.message) == ("bad_field", "bad_field: n is 0")
    with pytest.raises(ValueError, match="'n is 0' is no code"):
        Malformed("n is 0", "bad_field")
