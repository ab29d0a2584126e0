"""A lake in an S3-compatible bucket (s3://). botocore is known here and nowhere else."""
