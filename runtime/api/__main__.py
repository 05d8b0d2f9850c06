"""`python -m precede` is the command line."""

import sys

if __name__ == "__main__":
    try:
        from precede.cli import main

        main()
    except KeyboardInterrupt:
        # Only while modules are loaded; the command line itself answers the rest.
        if sys.stderr is not None:
            print("precede: interrupted; what was not finished was not written", file=sys.stderr)
        sys.exit(2)
