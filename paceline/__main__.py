"""`python -m paceline` is the command line."""

from paceline.cli import main

if __name__ == "__main__":
    main()
