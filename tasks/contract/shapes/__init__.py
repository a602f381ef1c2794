"""Parameters and results of jobs as type checkers see them."""
