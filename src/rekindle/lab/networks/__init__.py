"""Networks that the laboratory studies, one a file."""
