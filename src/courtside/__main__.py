"""`python -m courtside`."""

from courtside.cli import main

if __name__ == "__main__":
    main()
