"""One file per format of public data sets: bytes on disk in, arrays out."""
