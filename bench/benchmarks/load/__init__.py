"""Load as it comes: requests of mixed lengths, all at once or one by one, alone and beside bulk work."""
