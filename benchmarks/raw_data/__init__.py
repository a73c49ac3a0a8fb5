"""Generated archives in the raw formats of the public data sets, for tests and benchmarks of the preprocessors.

python -m benchmarks.raw_data ml-1m --output ml-1m.zip
"""
