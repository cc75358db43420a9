"""One-time tokens: one device, one key, one day."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.identity.tokens import TokenRefused, TokenState, TokenStore

NOW_S, DAY_S = 1_700_000_000.0, 86_400.0
KEY, OTHER = b"a key", b"another key"


@pytest.fixture
def tokens(tmp_path: Path) -> TokenStore:
    return TokenStore(path=tmp_path / "tokens.sqlite")


def refusal(tokens: TokenStore, token: str, cid: str, key: bytes, now_s: float) -> str:
    with pytest.raises(TokenRefused) as refused:
        tokens.redeem(token, cid, key, now_s)
    assert refused.value.exit_code == 5
    return refused.value.code


def test_a_token_is_good_until_the_last_moment_of_its_day(tokens: TokenStore) -> None:
    token = tokens.issue("d1", NOW_S)
    assert tokens.states() == [TokenState(cid="d1", expires_s=NOW_S + DAY_S, used=False, refused=0)]
    assert [tokens.is_open(token, NOW_S + after_s) for after_s in (0, DAY_S, DAY_S + 1)] == [True, True, False]
    assert refusal(tokens, token, "d1", KEY, NOW_S + DAY_S + 1) == "expired"
    assert tokens.redeem(token, "d1", KEY, NOW_S + DAY_S) == NOW_S + DAY_S


def test_a_token_is_for_one_device_and_one_key_which_may_ask_again(tokens: TokenStore) -> None:
    token = tokens.issue("d1", NOW_S)
    assert refusal(tokens, token, "d2", KEY, NOW_S) == "unknown"
    assert refusal(tokens, "no token", "d1", KEY, NOW_S) == "unknown"
    assert [tokens.redeem(token, "d1", KEY, NOW_S + after_s) for after_s in (1, 2)] == [NOW_S + 1, NOW_S + 1]
    assert [refusal(tokens, token, "d1", OTHER, NOW_S) for _ in range(2)] == ["used", "used"]
    assert tokens.states() == [TokenState(cid="d1", expires_s=NOW_S + DAY_S, used=True, refused=2)]
    assert not tokens.is_open(token, NOW_S)


def test_a_new_token_takes_the_place_of_an_unused_one_of_the_same_device(tokens: TokenStore) -> None:
    first, other = tokens.issue("d1", NOW_S), tokens.issue("d2", NOW_S)
    second = tokens.issue("d1", NOW_S + 1)
    assert [tokens.is_open(token, NOW_S) for token in (first, second, other)] == [False, True, True]


def test_a_withdrawal_leaves_a_token_that_is_bound_to_a_key_unless_it_is_meant(tokens: TokenStore) -> None:
    assert not tokens.withdraw("d1")
    tokens.redeem(tokens.issue("d1", NOW_S), "d1", KEY, NOW_S)
    tokens.issue("d2", NOW_S)
    assert [tokens.withdraw("d1"), tokens.withdraw("d2"), tokens.withdraw("d2")] == [False, True, False]
    assert [state.cid for state in tokens.states()] == ["d1"]
    assert tokens.withdraw("d1", bound=True)
    assert tokens.states() == []
