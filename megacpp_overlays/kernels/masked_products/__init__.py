"""Matrix products over some rows of a matrix, chosen on the device."""
