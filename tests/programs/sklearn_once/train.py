"""A fit that prints once: positional values from sys.argv with defaults, three lines at the end."""

import sys

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.linear_model import ElasticNet
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from sklearn.model_selection import train_test_split

if __name__ == "__main__":
    np.random.seed(40)
    x, y = load_diabetes(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x, y)
    alpha = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    l1_ratio = float(sys.argv[2]) if len(sys.argv) > 2 else 0.5
    lr = ElasticNet(alpha=alpha, l1_ratio=l1_ratio, random_state=42).fit(train_x, train_y)
    predicted = lr.predict(test_x)
    rmse = np.sqrt(mean_squared_error(test_y, predicted))
    print(f"Elasticnet model (alpha={alpha:f}, l1_ratio={l1_ratio:f}):")
    print(f"  RMSE: {rmse}")
    print(f"  MAE: {mean_absolute_error(test_y, predicted)}")
    print(f"  R2: {r2_score(test_y, predicted)}")
