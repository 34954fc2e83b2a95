"""`python -m chairlift` is the command line, too."""

from chairlift.cli import main

if __name__ == "__main__":
    main()
