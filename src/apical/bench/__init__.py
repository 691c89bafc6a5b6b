"""The bench: recorded settings, the paper's figures, results as files, and the comparison with the control."""
