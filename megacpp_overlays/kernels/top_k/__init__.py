"""The k largest numbers of each row, in the order of their positions, with a result that is defined on ties."""
