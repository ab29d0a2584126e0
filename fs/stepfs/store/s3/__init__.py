"""A lake in an S3-compatible bucket (s3://). boto3 is known here and nowhere else."""
