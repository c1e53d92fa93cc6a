"""What every probe says of every release, from archives that are read and never imported."""
