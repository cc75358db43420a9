package main

// The optimisers of a fit: sections 7 and 8. Pure.

import (
	"math"
	"strings"
)

var optimiserOptions = map[string]string{
	"sgd":   "momentum nesterov weight_decay clip_norm",
	"adam":  "beta1 beta2 eps weight_decay clip_norm",
	"adamw": "beta1 beta2 eps weight_decay clip_norm",
}

var optionLimits = map[string][2]float64{"momentum": {0, 1}, "beta1": {0, 0.999999}, "beta2": {0, 0.999999}, "eps": {1e-16, 1}}

func checkOptimiser(of object) {
	name, _ := of["name"].(string)
	options := strings.Fields(optimiserOptions[name])
	need(len(options) > 0 && len(of) == len(options)+1, "bad_field", "optimiser %q", name)
	for _, option := range options {
		if option == "nesterov" {
			checkField(option, "bool", of[option])
			continue
		}
		value, isNumber := number(of[option])
		limits, bounded := optionLimits[option]
		need(isNumber && value >= 0 && (!bounded || value >= limits[0] && value <= limits[1]), "bad_field", "option %s", option)
	}
	momentum, _ := number(of["momentum"])
	need(of["nesterov"] != true || momentum > 0, "bad_task", "nesterov needs a momentum above 0")
}

// optimiser moves weights by gradients; its sums begin at zero with each task.
type optimiser struct {
	of            object
	first, second []float64
	steps         float64
}

func newOptimiser(of object, size int) *optimiser {
	return &optimiser{of: of, first: make([]float64, size), second: make([]float64, size)}
}

func (o *optimiser) option(name string) float64 {
	value, _ := number(o.of[name])
	return value
}

func (o *optimiser) move(w, g []float64, lr float64) {
	o.steps++
	squares, shrink := 0.0, 1.0
	for _, v := range g {
		squares += v * v
	}
	if clip := o.option("clip_norm"); clip > 0 {
		shrink = math.Min(1, clip/(math.Sqrt(squares)+1e-6))
	}
	decay, beta1, beta2 := o.option("weight_decay"), o.option("beta1"), o.option("beta2")
	for i := range w {
		v := shrink * g[i]
		if o.of["name"] == "adamw" {
			w[i] -= lr * decay * w[i]
		} else {
			v += decay * w[i]
		}
		if o.of["name"] == "sgd" {
			o.first[i] = o.option("momentum")*o.first[i] + v
			if o.of["nesterov"] == true {
				w[i] -= lr * (v + o.option("momentum")*o.first[i])
			} else {
				w[i] -= lr * o.first[i]
			}
			continue
		}
		o.first[i] = beta1*o.first[i] + (1-beta1)*v
		o.second[i] = beta2*o.second[i] + (1-beta2)*v*v
		mean, spread := o.first[i]/(1-math.Pow(beta1, o.steps)), o.second[i]/(1-math.Pow(beta2, o.steps))
		w[i] -= lr * mean / (math.Sqrt(spread) + o.option("eps"))
	}
}

func (v *vectors) optimisers(of object) {
	lr, _ := number(of["lr"])
	for _, row := range list(of["rows"]) {
		line, w := list(row), append([]float64{}, numbers(of["start"])...)
		checkOptimiser(line[0].(object))
		rule := newOptimiser(line[0].(object), len(w))
		for k := 0; k < int(of["steps"].(int64)); k++ {
			g := make([]float64, len(w))
			for i := range g {
				g[i] = float64(7*(len(w)*k+i)%11-5) / 8
			}
			rule.move(w, g, lr)
		}
		for i, expected := range numbers(line[1]) {
			v.same("weights of "+string(writeJSON(line[0])), math.Abs(w[i]-expected) < 1e-9, true)
		}
	}
}
