// The step of docs/native/train.cc with ONNX Runtime's Java API (com.microsoft.onnxruntime:onnxruntime-android).
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

final class Train implements AutoCloseable {
    private final OrtEnvironment env = OrtEnvironment.getEnvironment();
    private final OrtSession session;
    private final List<String> inputs; // in the file's order
    private final List<String> outputs;
    private final Map<String, long[]> shapes = new HashMap<>();
    private final Map<String, float[]> values = new HashMap<>();

    /** Every input is zero at first: velocity, linear, mu and the anchor take no part in plain training. */
    Train(String step, float[] vector, float lr, float momentum, int batch) throws OrtException {
        session = env.createSession(step);
        inputs = new ArrayList<>(session.getInputNames());
        outputs = new ArrayList<>(session.getOutputNames());
        int at = 0;
        for (String name : inputs) {
            long[] shape = ((TensorInfo) session.getInputInfo().get(name).getInfo()).getShape();
            int size = 1;
            for (int d = 0; d < shape.length; d++) {
                shape[d] = shape[d] < 0 ? batch : shape[d];
                size *= (int) shape[d];
            }
            float[] value = new float[size];
            if (name.startsWith("w/") || name.startsWith("buffers/")) {
                System.arraycopy(vector, at, value, 0, size);
                at += size;
            }
            shapes.put(name, shape);
            values.put(name, value);
        }
        values.get("lr")[0] = lr;
        values.get("momentum")[0] = momentum;
        java.util.Arrays.fill(values.get("q"), 1f / batch); // the mean over the batch
    }

    /** One step on x [batch, ...] and y [batch, classes], one-hot; the loss before it. */
    float step(float[] x, float[] y) throws OrtException {
        values.put("x", x);
        values.put("y", y);
        Map<String, OnnxTensor> given = new HashMap<>();
        try {
            for (String name : inputs) {
                given.put(name, OnnxTensor.createTensor(env, FloatBuffer.wrap(values.get(name)), shapes.get(name)));
            }
            try (OrtSession.Result made = session.run(given)) {
                for (int i = 0; i + 1 < outputs.size(); i++) { // output i is input i of the next step
                    ((OnnxTensor) made.get(i)).getFloatBuffer().get(values.get(inputs.get(i)));
                }
                return ((OnnxTensor) made.get(outputs.size() - 1)).getFloatBuffer().get();
            }
        } finally {
            given.values().forEach(OnnxTensor::close);
        }
    }

    /** Of one parameter or buffer, by its name: "w/0.weight", "buffers/1.running_mean". */
    float[] read(String name) {
        return values.get(name).clone();
    }

    @Override
    public void close() throws OrtException {
        session.close();
    }
}
