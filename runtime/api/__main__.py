"""`python -m precede` is the command line."""

from precede.cli import main

if __name__ == "__main__":
    main()
