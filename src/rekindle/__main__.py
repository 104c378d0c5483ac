"""`python -m rekindle` is the command line."""

from rekindle.cli import main

if __name__ == "__main__":
    main()
