"""EC2: rent instances with real money, and get them back whatever happens. Only this package imports boto3."""
