"""`forge.Run`, its loops and step boundaries, saves, and the NaN policy."""
