"""File names in the folder of a simulated run."""

TREE_FILE = "tree.npz"  # beside the centers: edges and models of coordinator/strategies/common/center_tree.py
