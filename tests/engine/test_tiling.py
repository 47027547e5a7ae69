"""How products are cut for a CUDA device: every row is taken, and a sum's order goes by columns and types alone."""

from __future__ import annotations

import pytest

from expertstream_engine.cuda.tiling import THREADS, Tiling

COLUMNS = [256 * blocks for blocks in range(1, 225)]
TYPES = [("Q4_K",), ("Q6_K", "Q6_K"), ("Q8_0",), ("F32",), ("Q4_K", "F16")]


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("row_count", [1, 5, 768, 4096, 4097])
def test_the_blocks_are_as_many_as_the_rows_need(row_count: int, types: tuple[str, ...]) -> None:
    for columns in COLUMNS:
        for tokens in (1, 2):
            tiling = Tiling.of(columns, tokens, *types)
            rows_of_a_block = THREADS // tiling.lanes * tiling.rows
            assert (tiling.blocks(row_count) - 1) * rows_of_a_block < row_count
            assert row_count <= tiling.blocks(row_count) * rows_of_a_block


@pytest.mark.parametrize("types", TYPES)
def test_the_lanes_of_a_row_are_the_same_for_any_number_of_tokens(types: tuple[str, ...]) -> None:
    for columns in (1, 33, 64, 96, *COLUMNS):
        assert len({Tiling.of(columns, tokens, *types).lanes for tokens in (1, 2, 8, 9, 500)}) == 1


def test_at_most_an_eighth_of_the_lanes_is_idle_where_fewer_would_be_busier() -> None:
    for columns in COLUMNS:
        lanes = Tiling.of(columns, 1, "Q4_K").lanes
        steps = -(-columns // (64 * lanes))
        assert lanes == 4 or columns >= 7 / 8 * 64 * lanes * steps


def test_floats_are_read_by_whole_warps() -> None:
    assert {Tiling.of(columns, 1, "F32").lanes for columns in (1, 96, 768, 2048)} == {32}
