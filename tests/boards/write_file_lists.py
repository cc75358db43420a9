"""Writes tests/golden/boards.json, the list of files of each profile, after a wanted change:

python -m tests.boards.write_file_lists
"""

from __future__ import annotations

import json

from edge_client.board.profiles import BOARD_PROFILES
from tests.edge_client.board.test_board_files import GOLDEN, made

if __name__ == "__main__":
    told = {
        board: {e.path: [f"{e.mode:04o}", e.owner, e.link or e.data.decode()] for e in made(board).values()}
        for board in BOARD_PROFILES
    }
    GOLDEN.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
