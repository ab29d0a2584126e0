"""One training job on stepfs and on what people use today."""
